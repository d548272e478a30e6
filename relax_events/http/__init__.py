"""What all of our HTTP servers share: the listening socket, the request guard, and plain
responses.
"""
