"""The models that the project trains itself; services load their folders and import nothing from here."""
