"""Pictures of videos: frames at given times, and files of pictures with sound."""
