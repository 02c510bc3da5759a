"""Random programs: what compiled code returns and changes is compared with eager."""
