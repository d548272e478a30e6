"""The Helm chart on a real cluster, and the program that proves it there."""
