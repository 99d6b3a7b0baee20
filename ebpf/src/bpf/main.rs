//! The programs' entry points.
#![no_std]
#![no_main]
#![cfg_attr(target_arch = "bpf", feature(asm_experimental_arch))]
#![expect(clippy::needless_pass_by_value, reason = "the macros of aya-ebpf hand the context over by value")]

use aya_ebpf::{
    macros::{cgroup_sock, cgroup_sock_addr},
    programs::{SockAddrContext, SockContext},
};

mod atomic;
mod bind;
mod count;
mod maps;
mod select;
mod sock_addr;
mod socket_lb;

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

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
