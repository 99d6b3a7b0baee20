//! The one place that promises "plain old data".

macro_rules! pod {
    ($(#[$m:meta])* pub struct $name:ident [$size:literal] { $($(#[$f:meta])* pub $field:ident: $ty:ty,)* }) => {
        $(#[$m])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name { $($(#[$f])* pub $field: $ty,)* }
        // No padding: the fields' sizes add up to the struct's size, which the declaration pins too.
        const _: () = assert!(size_of::<$name>() == $size && 0 $(+ size_of::<$ty>())* == $size);
        // SAFETY: repr(C), integers, integer arrays and other pod! types only; the sum above leaves no padding byte.
        #[cfg(feature = "user")]
        unsafe impl aya::Pod for $name {}
    };
}
