"""The controller role's parts: health manager, scaling, autoscaler, retention, and the HTTP API."""
