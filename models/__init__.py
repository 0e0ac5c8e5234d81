"""Models trained by this project.

Services load their folders and do not import from here.
"""
