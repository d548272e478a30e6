"""Policy versions from the trainer's memory into the workers', over torch.distributed. The version
is proven by the artifact's digest.
"""
