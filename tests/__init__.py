"""The test suite: a package, so that tests import support code by its full name (tests.support)."""
