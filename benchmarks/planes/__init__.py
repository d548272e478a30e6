"""Ways to bring a sample from where it was made to where it is used, all behind one protocol, each
in processes of its own."""
