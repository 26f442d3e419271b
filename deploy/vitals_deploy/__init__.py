"""Generates what a deployment needs, from the catalog: rules, dashboards, units, batch scripts.

Every generator is a pure function from settings to the texts of files. What it makes with the
default settings lies in the folders beside this package.
"""
