"""The models that the project trains itself.

Services load their folders and import nothing from here.
"""
