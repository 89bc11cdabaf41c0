"""Helpers of the tests: environments, configurations, waiting, processes and clusters."""
