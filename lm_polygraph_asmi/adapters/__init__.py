"""Thin clients of one function, `contract.assess`: a server, Inspect, MLflow, OpenTelemetry.

The scorer knows nothing of them. Each needs the extra of its name, and imports it when it is used.
"""
