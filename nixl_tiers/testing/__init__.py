"""What tests of storage tiers need: servers to test against. Public, for those who write tiers of their own."""
