"""The emulated EC2: moto, with what moto lacks or loses. The only importer of moto."""
