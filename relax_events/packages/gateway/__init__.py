"""The gateway: model APIs by which a foreign program talks with the policy in a session."""
