"""Eviction policies: which key of a tier goes first."""
