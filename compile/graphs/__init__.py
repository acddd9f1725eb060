"""Steps that are captured once and replayed: when, which, and from what memory."""
