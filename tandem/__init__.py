"""Tandem: the public face."""
