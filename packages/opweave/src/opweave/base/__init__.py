"""The lowest package, which all others import.

Errors, owners of registrations, transactions and registration sites. Imports only torch and the
standard library.
"""
