"""The streaming job: process, query, batch commit, request handler."""
