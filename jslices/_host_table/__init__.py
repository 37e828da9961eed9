"""Host tables: larger than the memory of a device, in that of the host or in a file.

A row and what the optimizer keeps for it are one record (``layout.py``), records are in
memory or in a file (``records.py``), and those of a batch go to the device and come back
(``table.py``).
"""
