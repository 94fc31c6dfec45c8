"""Who is here: this process, its device, its group, and what the group can do together."""
