//! The programs' entry points.
#![no_std]
#![no_main]
#![cfg_attr(target_arch = "bpf", feature(asm_experimental_arch))]
#![expect(clippy::needless_pass_by_value, reason = "the macros of aya-ebpf hand the context over by value")]

use aya_ebpf::{
    macros::{cgroup_sock, cgroup_sock_addr, classifier},
    programs::{SockAddrContext, SockContext, TcContext},
};

mod atomic;
mod bind;
mod conntrack;
mod count;
mod csum;
mod icmp;
mod maps;
mod nat;
mod own;
mod packet;
mod pick;
mod ping;
mod refuse;
mod route;
mod select;
mod skb;
mod sock_addr;
mod socket_lb;
mod unreachable;
mod verifier;
mod watch;

use sock_addr::{V4, V6};

/// Needs Linux ≥ 4.17.
#[cgroup_sock_addr(connect4)]
fn connect4(ctx: SockAddrContext) -> i32 {
    socket_lb::connect::<V4>(&ctx)
}

/// Needs Linux ≥ 4.17. Also called for v4-mapped addresses.
#[cgroup_sock_addr(connect6)]
fn connect6(ctx: SockAddrContext) -> i32 {
    socket_lb::connect::<V6>(&ctx)
}

/// Needs Linux ≥ 4.18. Also called for v4-mapped addresses on IPv6 sockets.
#[cgroup_sock_addr(sendmsg4)]
fn sendmsg4(ctx: SockAddrContext) -> i32 {
    socket_lb::sendmsg::<V4>(&ctx)
}

/// Needs Linux ≥ 4.18.
#[cgroup_sock_addr(sendmsg6)]
fn sendmsg6(ctx: SockAddrContext) -> i32 {
    socket_lb::sendmsg::<V6>(&ctx)
}

/// Needs Linux ≥ 5.2.
#[cgroup_sock_addr(recvmsg4)]
fn recvmsg4(ctx: SockAddrContext) -> i32 {
    socket_lb::recvmsg::<V4>(&ctx)
}

/// Needs Linux ≥ 5.2. Also called for v4-mapped senders on IPv6 sockets.
#[cgroup_sock_addr(recvmsg6)]
fn recvmsg6(ctx: SockAddrContext) -> i32 {
    socket_lb::recvmsg::<V6>(&ctx)
}

/// Needs Linux ≥ 5.8.
#[cgroup_sock_addr(getpeername4)]
fn getpeername4(ctx: SockAddrContext) -> i32 {
    socket_lb::getpeername::<V4>(&ctx)
}

/// Needs Linux ≥ 5.8.
#[cgroup_sock_addr(getpeername6)]
fn getpeername6(ctx: SockAddrContext) -> i32 {
    socket_lb::getpeername::<V6>(&ctx)
}

/// Needs Linux ≥ 5.9. Runs once a socket, at the last close of shared descriptors, and after SIGKILL too.
#[cgroup_sock(sock_release)]
fn sock_release(ctx: SockContext) -> i32 {
    socket_lb::release(&ctx)
}

/// Needs Linux ≥ 4.17.
#[cgroup_sock(post_bind4)]
fn post_bind4(ctx: SockContext) -> i32 {
    bind::post_bind4(&ctx)
}

/// Needs Linux ≥ 4.17.
#[cgroup_sock(post_bind6)]
fn post_bind6(ctx: SockContext) -> i32 {
    bind::post_bind6(&ctx)
}

/// Packets arrive on a device that clients outside this node come through.
#[classifier]
fn tc_ingress(ctx: TcContext) -> i32 {
    packet::ingress(ctx.skb.skb)
}

/// Packets leave through such a device.
#[classifier]
fn tc_egress(ctx: TcContext) -> i32 {
    packet::egress(ctx.skb.skb, true)
}

/// Packets arrive from a workload of this node whose sockets the socket path serves.
#[classifier]
fn tc_pod_ingress(ctx: TcContext) -> i32 {
    packet::ingress_from_workload(ctx.skb.skb)
}

/// Packets leave towards such a workload.
#[classifier]
fn tc_pod_egress(ctx: TcContext) -> i32 {
    packet::egress(ctx.skb.skb, false)
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
