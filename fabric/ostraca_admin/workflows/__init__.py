"""Long operations on enclosures and tenants: onboarding, drain and erase, with steps."""
