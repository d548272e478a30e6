"""SASL/SCRAM-SHA-512 over TLS with ACLs: certificates, passwords, broker settings, and their
application to a cluster.
"""
