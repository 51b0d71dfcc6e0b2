"""What tests of storage tiers need. Public, for those who write tiers of their own."""
