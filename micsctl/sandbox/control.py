"""The sandbox as the command line sees it: start it, look at it, break it, stop it."""
