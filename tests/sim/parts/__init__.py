"""The services of a domain, each with clients that use it at random."""
