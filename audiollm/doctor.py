def doctor() -> None:
    """placeholder"""
