"""The half hour on a GPU: the builds, tests and measurements to run there, prepared beforehand."""
