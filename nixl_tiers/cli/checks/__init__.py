"""What `nixl-tiers doctor` looks at: one file for each part of the machine, and for each kind of tier."""
