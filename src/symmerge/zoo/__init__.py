"""Models made here: small ones of every family, for the demo and the tests."""
