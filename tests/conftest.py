"""Settings of every test: no test is judged by its speed."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "tailrace", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("tailrace")
