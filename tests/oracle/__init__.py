"""Independent reference implementation of the published formulas, for the tests to compare with."""
