"""The "decide" step of the loop: from alerts to notifications, from accepted commands to operations."""
