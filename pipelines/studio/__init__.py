"""The studio: sounds made and edited in the browser, runs looked through, on the local address."""
