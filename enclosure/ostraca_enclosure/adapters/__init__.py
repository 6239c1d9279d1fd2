"""What drives an enclosure has, and how it exports them: on files for laptops and CI, and by Linux's NVMe
drives and NVMe-oF target (nvmet).
"""
