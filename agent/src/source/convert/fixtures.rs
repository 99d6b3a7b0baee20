//! Small builders of API objects for tests.
