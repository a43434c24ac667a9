"""Refusals: settings, data and trainer must fit together."""
