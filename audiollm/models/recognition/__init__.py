"""Speech recognizers in local folders, called in one way by annotation, evaluation and rewards."""
