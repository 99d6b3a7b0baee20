//! Bind protection: a process of the host must not take a NodePort away from its clients (F40).
#![expect(clippy::undocumented_unsafe_blocks, reason = "every block reads one field of the live context")]

use crate::{
    count, maps,
    sock_addr::{GO_ON, fail},
    socket_lb::loopback,
};
use aya_ebpf::programs::SockContext;
use core::ptr::read_volatile as read;
use sheave_ebpf::{
    addr::Addr,
    counter::Counter,
    frontend::{FrontendKey, KIND_LOOPBACK, KIND_NODE_PORT},
};

/// What an application understands when its port is taken.
const EADDRINUSE: i32 = 98;

#[inline(always)]
pub fn post_bind4(ctx: &SockContext) -> i32 {
    if !applies(ctx) {
        return GO_ON;
    }
    let addr = Addr::v4(unsafe { read(&raw const (*ctx.sock).src_ip4) });
    verdict(is_node_port(ctx, &addr))
}

#[inline(always)]
pub fn post_bind6(ctx: &SockContext) -> i32 {
    if !applies(ctx) {
        return GO_ON;
    }
    // VERIFIER: element by element, as in sock_addr.rs.
    let addr = unsafe {
        Addr {
            words: [
                read(&raw const (*ctx.sock).src_ip6[0]),
                read(&raw const (*ctx.sock).src_ip6[1]),
                read(&raw const (*ctx.sock).src_ip6[2]),
                read(&raw const (*ctx.sock).src_ip6[3]),
            ],
        }
    };
    let wildcard = addr.words[0] | addr.words[1] | addr.words[2] | addr.words[3] == 0;
    // A wildcard IPv6 socket takes the IPv4 port too.
    verdict(is_node_port(ctx, &addr) || (wildcard && is_node_port(ctx, &Addr::v4(0))))
}

#[inline(always)]
fn applies(ctx: &SockContext) -> bool {
    maps::bind_protection() && maps::is_host_socket(ctx)
}

/// The loopback entry of a NodePort stands for its wildcard too.
#[inline(always)]
fn is_node_port(ctx: &SockContext, addr: &Addr) -> bool {
    let (port, proto) =
        unsafe { (read(&raw const (*ctx.sock).src_port) as u16, read(&raw const (*ctx.sock).protocol) as u8) };
    // Host order here, unlike everywhere else: `bpf_sock.src_port`.
    let addr = loopback(addr).unwrap_or(*addr);
    let frontend = maps::frontend(&FrontendKey { addr, port: port.to_be(), proto, zero: 0 });
    frontend.is_some_and(|f| f.kind == KIND_NODE_PORT || f.kind == KIND_LOOPBACK)
}

#[inline(always)]
fn verdict(refused: bool) -> i32 {
    if refused {
        count::bump(Counter::BindRefused);
        return fail(EADDRINUSE);
    }
    GO_ON
}
