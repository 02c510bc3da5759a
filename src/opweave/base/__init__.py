"""The ground floor that every other package builds on.

Errors, the owner of a registration, transactions and registration sites. Imports torch and the
standard library, nothing else of opweave.
"""
