"""Runs a model on one device: the worker, its model runner and its compiled forward."""
