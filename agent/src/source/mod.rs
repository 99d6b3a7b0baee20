//! Where objects come from. Every source tells the same [`Update`](crate::model::Update)s.

pub mod address;
pub mod convert;
pub mod intern;
