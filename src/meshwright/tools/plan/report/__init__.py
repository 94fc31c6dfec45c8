"""Show a plan: as text, as JSON, and as one HTML page."""
