"""The HTTP surface, on the API process's event loop; what is for any thread says so."""
