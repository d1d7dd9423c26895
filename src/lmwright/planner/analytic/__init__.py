"""Analytic: what a run takes, by arithmetic alone."""
