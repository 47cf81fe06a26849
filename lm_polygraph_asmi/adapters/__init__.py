"""Thin clients of `contract.assess`: a server, Inspect, MLflow, OpenTelemetry.

The scorer does not depend on them. Each imports its extra on first use.
"""
