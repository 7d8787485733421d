"""Who answers: measurements, models of a local folder, endpoints; and the check of their answers."""
