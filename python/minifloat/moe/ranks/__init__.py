"""Experts of several ranks: divided over them, or cut along their width."""
