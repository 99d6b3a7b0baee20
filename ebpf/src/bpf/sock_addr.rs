//! Access to `bpf_sock_addr` and to its socket. A family is a type, so no branch ever selects a context field: LLVM
//! would select between two pointers, and the verifier refuses to dereference such a context pointer.
#![expect(clippy::undocumented_unsafe_blocks, reason = "every block reads or writes one field of the live context")]

use crate::maps;
use aya_ebpf::{
    EbpfContext as _,
    bindings::{bpf_sock, bpf_sock_addr},
    helpers::{bpf_get_socket_cookie, bpf_set_retval, bpf_skc_to_mptcp_sock},
    programs::{SockAddrContext, SockContext},
};
use core::ptr::{read_volatile as read, write_volatile as write};
use sheave_ebpf::{addr::Addr, discard, proto};

type Raw = *mut bpf_sock_addr;

/// One address family's fields of the context.
pub trait Family {
    /// The address dialled or received from.
    fn addr(c: Raw) -> Addr;
    /// Replaces it.
    fn set_addr(c: Raw, addr: &Addr);
    /// The address that the socket is bound to; unspecified before it is.
    fn source(sk: *mut bpf_sock) -> Addr;
}

/// Sockets and datagrams of IPv4.
pub struct V4;
/// Sockets of IPv6, v4-mapped addresses included.
pub struct V6;

impl Family for V4 {
    #[inline(always)]
    fn addr(c: Raw) -> Addr {
        Addr::v4(unsafe { read(&raw const (*c).user_ip4) })
    }
    #[inline(always)]
    fn set_addr(c: Raw, addr: &Addr) {
        unsafe { write(&raw mut (*c).user_ip4, addr.words[3]) }
    }
    #[inline(always)]
    fn source(sk: *mut bpf_sock) -> Addr {
        Addr::v4(unsafe { read(&raw const (*sk).src_ip4) })
    }
}

impl Family for V6 {
    // VERIFIER: element by element; copying the array becomes memcpy: "dereference of modified ctx ptr".
    #[inline(always)]
    fn addr(c: Raw) -> Addr {
        unsafe {
            Addr {
                words: [
                    read(&raw const (*c).user_ip6[0]),
                    read(&raw const (*c).user_ip6[1]),
                    read(&raw const (*c).user_ip6[2]),
                    read(&raw const (*c).user_ip6[3]),
                ],
            }
        }
    }
    #[inline(always)]
    fn set_addr(c: Raw, addr: &Addr) {
        unsafe {
            write(&raw mut (*c).user_ip6[0], addr.words[0]);
            write(&raw mut (*c).user_ip6[1], addr.words[1]);
            write(&raw mut (*c).user_ip6[2], addr.words[2]);
            write(&raw mut (*c).user_ip6[3], addr.words[3]);
        }
    }
    #[inline(always)]
    fn source(sk: *mut bpf_sock) -> Addr {
        unsafe {
            Addr {
                words: [
                    read(&raw const (*sk).src_ip6[0]),
                    read(&raw const (*sk).src_ip6[1]),
                    read(&raw const (*sk).src_ip6[2]),
                    read(&raw const (*sk).src_ip6[3]),
                ],
            }
        }
    }
}

/// The port dialled or received from, network order.
#[inline(always)]
pub fn port(ctx: &SockAddrContext) -> u16 {
    unsafe { read(&raw const (*ctx.sock_addr).user_port) as u16 }
}

// VERIFIER: all four bytes; a 2-byte store is "invalid bpf_context access".
#[inline(always)]
pub fn set_port(ctx: &SockAddrContext, port: u16) {
    unsafe { write(&raw mut (*ctx.sock_addr).user_port, u32::from(port)) }
}

/// IANA protocol number. MPTCP (262) is cut to TCP's, whose ports it shares.
#[inline(always)]
pub fn protocol(ctx: &SockAddrContext) -> u8 {
    unsafe { read(&raw const (*ctx.sock_addr).protocol) as u8 }
}

/// Cookie of the socket, as user space sees it through sock_diag.
#[inline(always)]
pub fn cookie(ctx: &SockAddrContext) -> u64 {
    unsafe { bpf_get_socket_cookie(ctx.as_ptr()) }
}

/// As [`cookie`], where the context is the socket.
#[inline(always)]
pub fn cookie_of(ctx: &SockContext) -> u64 {
    unsafe { bpf_get_socket_cookie(ctx.as_ptr()) }
}

/// The protocol of a socket that is the context.
#[inline(always)]
pub fn protocol_of(ctx: &SockContext) -> u8 {
    unsafe { read(&raw const (*ctx.sock).protocol) as u8 }
}

/// The socket of the context.
#[inline(always)]
pub fn socket(ctx: &SockAddrContext) -> *mut bpf_sock {
    unsafe { (*ctx.sock_addr).__bindgen_anon_1.sk }
}

/// The MPTCP socket that the kernel connects a subflow for; null where there is none. An application holds, asks and
/// closes that one, and for a subflow `sock_release` never runs.
#[inline(always)]
pub fn mptcp(ctx: &SockAddrContext) -> *mut bpf_sock {
    if maps::has_mptcp() && protocol(ctx) == proto::TCP {
        return unsafe { bpf_skc_to_mptcp_sock(socket(ctx).cast()).cast() };
    }
    core::ptr::null_mut()
}

/// The socket's own port, host order; the kernel has chosen one before a datagram gets here.
#[inline(always)]
pub fn own_port(ctx: &SockAddrContext) -> u32 {
    unsafe { read(&raw const (*socket(ctx)).src_port) }
}

/// Whether the socket has a peer. `connect(AF_UNSPEC)` takes it away, and no program runs then.
#[inline(always)]
pub fn is_connected(ctx: &SockAddrContext) -> bool {
    // VERIFIER: all four bytes; before Linux 5.18 the field had them, and it is in its first two since.
    unsafe { read((&raw const (*socket(ctx)).dst_port).cast::<u32>()) != 0 }
}

/// The address that the socket is bound to; `None` when it is not.
#[inline(always)]
pub fn source<F: Family>(ctx: &SockAddrContext) -> Option<Addr> {
    let sk = socket(ctx);
    if sk.is_null() {
        return None;
    }
    let addr = F::source(sk);
    let [a, b, _, d] = addr.words;
    if (a | b | d) == 0 { None } else { Some(addr) }
}

/// What a program returns so that the call goes on.
pub const GO_ON: i32 = 1;
/// What a program returns so that the call fails.
pub const FAIL: i32 = 0;

/// Lets the call fail with `errno` where the kernel can, else with EPERM.
#[inline(always)]
pub fn fail(errno: i32) -> i32 {
    // VERIFIER: behind a constant, so that kernels before 5.18 never see the call.
    if maps::has_set_retval() {
        unsafe { bpf_set_retval(-errno) };
    }
    FAIL
}

/// The discard address of the family of `addr`.
#[inline(always)]
pub fn discard_for(addr: &Addr) -> Addr {
    if addr.is_v4() {
        Addr::v4(u32::from_ne_bytes(discard::V4.octets()))
    } else {
        const OCTETS: [u8; 16] = discard::V6.octets();
        Addr {
            words: [
                u32::from_ne_bytes([OCTETS[0], OCTETS[1], OCTETS[2], OCTETS[3]]),
                0,
                0,
                u32::from_ne_bytes([OCTETS[12], OCTETS[13], OCTETS[14], OCTETS[15]]),
            ],
        }
    }
}
