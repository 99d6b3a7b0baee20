//! Maglev fill.
